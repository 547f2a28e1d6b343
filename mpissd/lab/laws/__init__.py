"""Laws of a real pair, from recordings and from rows of text: acceptance, hits, correlations.

outcomes    the rounds of a recording, or of a row, one line a sequence and round
ranks       how far down the draft's candidates the bonus token was: counts, and the law fitted
measures    acceptance, its parts by position and source, and correlations; bootstrap intervals
command     `python -m mpissd laws`: reads sources, prints a table, writes the file (docs/laws.md)
"""
