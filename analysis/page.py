"""The HTML template of the report, with its style for phones, screens and paper, light and dark."""

from __future__ import annotations

from string import Template

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>mpissd: figures and numbers</title>
<style>
:root { --ink: #1b1b1b; --soft: #555; --paper: #fff; --card: #f6f6f4; --line: #d9d9d6;
  --link: #0a5a96; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ececec; --soft: #b3b3b3; --paper: #141414; --card: #1f1f1f; --line: #3a3a3a;
    --link: #7cc0f5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.35rem; line-height: 1.25; margin: 2.5rem 0 .5rem;
  border-bottom: 2px solid var(--line); }
h3 { font-size: 1.1rem; margin: 0 0 .4rem; }
section > h3 { margin-top: 1rem; }
a { color: var(--link); }
nav a { display: inline-block; margin: 0 1rem .3rem 0; }
figure { margin: 1.5rem 0; padding: 1rem; background: var(--card); border-radius: .6rem; }
figcaption, .small, .notes, .links { color: var(--soft); font-size: .85rem; }
.finding { margin: .7rem 0 .3rem; }
figure h3, figcaption { position: absolute; clip-path: inset(50%); height: 1px; overflow: hidden; }
.pan { overflow-x: auto; }
.pan img { display: block; width: 100%; min-width: 46rem; background: #fff; border-radius: .3rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: left; border-bottom: 1px solid var(--line);
  white-space: nowrap; overflow-wrap: normal; }
td.n { text-align: right; }
summary { cursor: pointer; padding: .3rem 0; }
.tag { font-size: .75rem; padding: .1rem .5rem; border: 1px solid currentColor; border-radius: 1rem;
  vertical-align: middle; }
@media (max-width: 40rem) {
  body { padding: .6rem; } figure { padding: .6rem; margin: 1rem -.2rem; }
  figure h3, figcaption { position: static; clip-path: none; height: auto; }
}
@media print {
  @page { size: A4; margin: 12mm; }
  :root { --ink: #000; --soft: #333; --paper: #fff; --card: #fff; --line: #bbb; --link: #000; }
  body { max-width: none; padding: 0; font-size: 9.5pt; }
  figure { padding: 0; break-inside: avoid; }
  .pan { overflow: visible; } .pan img { min-width: 0; }
  nav, .links, details { display: none; }
  table { font-size: 6.8pt; } th, td { padding: 1pt 3pt; white-space: normal; }
  h2 { break-before: page; } h2, h3 { break-after: avoid; }
  section:first-of-type h2 { break-before: auto; }
}
</style>
</head>
<body>
<header><h1>mpissd: figures and numbers</h1><p>$intro</p>
<nav>$links <a href="#sources">Sources</a></nav></header>
<main>
$sections
<section id="sources"><h2>Sources</h2>$sources$dropped</section>
</main>
</body>
</html>
""")
