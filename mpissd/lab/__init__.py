"""The laboratory, which measures runs, predicts them, and explains the differences."""
