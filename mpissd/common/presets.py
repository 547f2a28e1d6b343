"""Names of models and of target/draft pairs, and their shapes and files.

A model's name is a preset or alias ("70b"), a shape (gen:layers=…,hidden=…,ffn=…), files of weights
or a config.json (model_files.py), or a head-sized draft of any of these, "eagle:70b" (shapes.py). A
pair is "70b/1b". A preset's name takes precedence over a file's: write `./8b` for a folder called
`8b`.
"""

import re
from pathlib import Path

from mpissd.common import model_files
from mpissd.common.errors import ConfigError, unknown
from mpissd.common.shapes import SCALED, DraftHead
from mpissd.common.shapes import ModelShape as ModelShape

GEN_FORM = "gen:layers=…,hidden=…,ffn=…"
_NUMBER = re.compile(r"\s*[0-9]{1,9}\s*")
_GEN_KEYS = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated")
_HEADED = re.compile(r"(eagle|mtp|medusa|mlp)(\d{1,5})?([:-])(.+)", re.IGNORECASE | re.DOTALL)
_SHAPES = (
    #          name             layers hidden heads kv head_dim  ffn gated  vocab
    ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, True, 128256),
    ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, True, 128256),
    ModelShape("llama-3.2-3b", 28, 3072, 24, 8, 128, 8192, True, 128256),
    ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, True, 128256),
    ModelShape("smollm2-135m-instruct", 30, 576, 9, 3, 64, 1536, True, 49152),
    ModelShape("llama-65b", 80, 8192, 64, 64, 128, 22016, True, 32000),
    ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, True, 151936),
    ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, True, 151936),
    ModelShape("opt-66b", 64, 9216, 72, 72, 128, 36864, False, 50272),
    ModelShape("opt-30b", 48, 7168, 56, 56, 128, 28672, False, 50272),
    ModelShape("opt-13b", 40, 5120, 40, 40, 128, 20480, False, 50272),
    ModelShape("opt-6.7b", 32, 4096, 32, 32, 128, 16384, False, 50272),
    ModelShape("opt-2.7b", 32, 2560, 32, 32, 80, 10240, False, 50272),
    ModelShape("opt-1.3b", 24, 2048, 32, 32, 64, 8192, False, 50272),
    # The model's embeddings are 512 wide; their projections to the hidden width are not modelled.
    ModelShape("opt-350m", 24, 1024, 16, 16, 64, 4096, False, 50272),
    ModelShape("opt-125m", 12, 768, 12, 12, 64, 3072, False, 50272),
    # Two drafts of one size but unequal depth (arXiv 2402.01528, table 1).
    ModelShape("noft-1.3b", 24, 2048, 16, 16, 128, 5504, True, 32000),
    ModelShape("noft-wide-1.3b", 12, 2560, 20, 20, 128, 9280, True, 32000),
    # A pair for laptops. toy-target: 47 MB in float32; 8 rows take 8.7 ms on one CPU core.
    # toy-draft: 1.7 MB; one row takes 0.13 ms, so that 24 branches can grow in the target's time.
    ModelShape("toy-target", 4, 512, 8, 4, 64, 1408, True, 4096),
    ModelShape("toy-draft", 2, 128, 4, 4, 32, 384, True, 4096),
)
PRESETS: dict[str, ModelShape] = {shape.name: shape for shape in _SHAPES}
# Prompt lookup has no model, so its shape has no matrix products.
LOOKUP = ModelShape("lookup", 0, 1, 1, 1, 1, 1, False, 1, DraftHead(lm_heads=0))
# An alias of a preset is the size in its name, such as 70b or 0.6b.
ALIASES = {
    name.rpartition("-")[2]: name for name in PRESETS if name.startswith(("llama", "qwen", "opt"))
}
ALIASES |= {"smollm2": "smollm2-135m-instruct", "noft": "noft-1.3b", "noft-wide": "noft-wide-1.3b"}
PAIRS = {"toy": ("toy-target", "toy-draft")} | {
    pair: (ALIASES[target], ALIASES[draft])
    for pair in "8b/1b 70b/1b 70b/8b 32b/0.6b 66b/125m 65b/noft 65b/noft-wide".split()
    for target, draft in [pair.split("/")]
}
_HUB_OWNERS = ("meta-llama", "huggyllama", "qwen", "facebook")
_FORMS = (
    f"{GEN_FORM}, eagle:, mtp:, medusa: or mlp:MODEL, a Hugging Face folder, its config.json, a "
    ".gguf, or OWNER/NAME on the hub"
)


def resolve_model(text: str) -> ModelShape:
    """Returns the shape of the model that `text` names; raises ConfigError if it names none. The
    name may be: a preset or alias in any case (70b), also with the owner on the hub
    (meta-llama/Llama-3.1-8B) or a number of layers (70b@8L); gen:layers=…,hidden=…,ffn=… with
    optional heads, kv_heads, head_dim, vocab, gated; a Hugging Face folder, config.json, .gguf, or
    hub name in the cache; a head-sized draft of any of these (eagle:8b); or "lookup"."""
    text = text.strip()
    if text.lower() == LOOKUP.name:
        return LOOKUP
    if parts := _split_head(text):
        return resolve_model(parts[2]).headed(*parts[:2])
    if depth := SCALED.search(text):
        return resolve_model(text[: depth.start()]).scaled(int(depth[1]))
    if (name := preset_of(text)) is not None:
        return PRESETS[name]
    if text.startswith("gen:"):
        return _generated(text)
    return ModelShape(**model_files.read_shape(_find(text)))


def preset_of(text: str) -> str | None:
    """Returns the preset that `text` means by name, alias or hub name; None if it means none."""
    owner, _, name = text.strip().lower().rpartition("/")
    if owner and owner not in _HUB_OWNERS:
        return None
    name = name if owner else ALIASES.get(name, name)
    return name if name in PRESETS else None


def files_of(text: str) -> Path | None:
    """Returns the path of the Hugging Face folder, .gguf or config.json of the model named `text`;
    None if the name is only a shape. Raises ConfigError for an unknown name or missing files."""
    text = SCALED.sub("", text.strip())
    if (name := preset_of(text)) is not None:
        return model_files.packaged(name)
    if text.startswith("gen:") or text.lower() == LOOKUP.name or _split_head(text):
        return None
    return _find(text)


def has_weights(text: str) -> bool:
    """Returns whether a name is that of files with weights. Raises ConfigError as files_of does."""
    path = files_of(text)
    return path is not None and model_files.has_files(path)


def _find(text: str) -> Path:
    if (path := model_files.find(text)) is not None:
        return path
    names = [*PRESETS, *ALIASES, *model_files.SHIPPED]
    raise ConfigError(f"{unknown('model', text.lower(), names)}; or {_FORMS}")


def split_pair(text: str) -> tuple[str, str]:
    """Returns the names (target, draft) of a pair. text: a pair's name ("toy"), or TARGET/DRAFT,
    split at the first '/' that gives two known models. Raises ConfigError otherwise."""
    text = text.strip()
    pairs = {**PAIRS, **model_files.PAIRS}
    if text.lower() in pairs:
        return pairs[text.lower()]
    if "/" not in text:
        error = unknown("pair", text, pairs)
        raise ConfigError(f"{error}; or target/draft, each a preset, {_FORMS}")
    reason: object = f"no '/' parts it into a target and a draft, each a preset, {_FORMS}"
    for target, draft in _splits(text):
        try:
            resolve_model(target)
            resolve_model(draft)
        except ConfigError as error:
            reason = error if text.count("/") == 1 or _resolves(target) else reason
        else:
            return target, draft
    raise ConfigError(f"pair {text!r}: {reason}")


def _splits(text: str) -> list[tuple[str, str]]:
    return [(text[: slash.start()], text[slash.end() :]) for slash in re.finditer("/", text)]


def target_of(text: str) -> str:
    """Returns a pair's target, whose files may be absent. Raises ConfigError if unknown."""
    sides = missing_pair(text)
    return sides[0] if sides else split_pair(text)[0]


def is_missing(name: str) -> bool:
    """Returns whether `name` has the form OWNER/NAME of a model on the Hugging Face hub, is no
    preset, and has no files on this machine."""
    if not model_files.is_hub_name(name) or preset_of(name) is not None:
        return False
    return not _resolves(name) and model_files.find(name) is None


def missing_pair(text: str) -> tuple[str, ...]:
    """Returns the names (target, draft) of a pair TARGET/DRAFT if files of one of its models are
    not on this machine. Returns () if both are here, or if no '/' splits `text` into two models."""
    splits = _splits(text)
    if any(_resolves(target) and _resolves(draft) for target, draft in splits):
        return ()
    pairs = (sides for sides in splits if all(_resolves(s) or is_missing(s) for s in sides))
    return next(pairs, ())


def _resolves(name: str) -> bool:
    try:
        resolve_model(name)
    except ConfigError:
        return False
    return True


def _split_head(text: str) -> tuple[str, int | None, str] | None:
    """Splits the name of a head-sized draft, such as eagle:8b or medusa4:8b, into (kind, number or
    None, target); returns None for other names. A dash for the colon, as in the shape's own name
    eagle-llama-3.1-8b, counts only before a preset or gen:, since a path may have dashes."""
    match = _HEADED.fullmatch(text)
    if match is None:
        return None
    is_name = match[4].lower() in PRESETS or match[4].startswith("gen:")
    if match[3] == "-" and not is_name:
        return None
    return match[1].lower(), None if match[2] is None else int(match[2]), match[4]


def _generated(text: str) -> ModelShape:
    """Returns the shape of `gen:layers=…,hidden=…,ffn=…[,…]`; its name lists every value. Heads are
    64 wide by default. Raises ConfigError for an unknown, missing or repeated key."""
    given: dict[str, int] = {}
    for item in text.removeprefix("gen:").split(","):
        key, _, value = item.partition("=")
        if (key := key.strip()) not in _GEN_KEYS:
            raise unknown("key in gen:", key, _GEN_KEYS)
        if key in given or not _NUMBER.fullmatch(value):
            raise ConfigError(f"{text!r}: {item!r}: allowed: {key}=<whole number>, once")
        given[key] = int(value)
    if missing := [key for key in _GEN_KEYS[:3] if key not in given]:
        raise ConfigError(f"{text!r}: {missing[0]} is missing; allowed: {GEN_FORM}")
    # heads · head_dim = hidden gives the other one if only one of the two is given.
    factor, other = ("heads", "head_dim") if "heads" in given else ("head_dim", "heads")
    divisor = given.setdefault(factor, 64)
    hidden = given["hidden"]
    if other not in given:
        if divisor < 1 or hidden % divisor:
            where = f"{text!r}: {factor}={divisor}"
            raise ConfigError(f"{where}: allowed: a divisor of hidden={hidden}")
        given[other] = hidden // divisor
    given.setdefault("kv_heads", given["heads"])
    given.setdefault("vocab", 32000)
    given.setdefault("gated", 1)
    if given["gated"] not in (0, 1):
        raise ConfigError(f"{text!r}: gated={given['gated']}: allowed: 0, 1")
    return ModelShape(
        name="gen:" + ",".join(f"{key}={given[key]}" for key in _GEN_KEYS),
        num_layers=given["layers"],
        hidden=hidden,
        num_heads=given["heads"],
        num_kv_heads=given["kv_heads"],
        head_dim=given["head_dim"],
        ffn=given["ffn"],
        gated=bool(given["gated"]),
        vocab_size=given["vocab"],
    )
