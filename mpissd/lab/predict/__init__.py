"""Predicts a job's measurement, advises which job to run, and explains why a result is not faster.

costs       seconds of a round's pieces: host work by phase, forwards by row count
simulation  the model of a round: simulates many configurations on a run's draws, or on fresh ones
row         predict_row: a prediction with the keys of a result row
search      the advisor's configurations; laws: their acceptance and hit models
places      a machine's possible T for a pair; derive: at a T that was not measured
advisor     which mode, T, K, fan-out and backup to run on given GPUs; breakeven: where that ties;
            advice: plan's text
accuracy    the errors of predictions over rows, and the regret of their choices
why         the largest gaps between a result row and its floor

Pure NumPy: needs neither MPI nor a GPU.
"""
