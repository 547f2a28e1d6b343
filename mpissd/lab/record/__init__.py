"""Records what a real pair does at temperature 0, for --workload=replay."""
