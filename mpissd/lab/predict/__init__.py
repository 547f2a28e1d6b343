"""Predicts what a job would measure, and says which job to run, and why a result is not faster.

costs       what a round's pieces take: host work by phase, forwards by row count
simulation  the model of a round: simulates many configurations on a run's draws, or on fresh ones
row         predict_row: a prediction with the keys of a result row
search      the configurations that an advisor may choose from; laws: under which laws
places      where a pair can run on a machine; derive: at a T that was not measured
advisor     which mode, T, K, fan-out and backup to run on given GPUs; breakeven: where that ties;
            advice: what plan prints of it
accuracy    the errors of predictions over rows, and the regret of their choices
why         the largest gaps between a result row and its floor

Pure NumPy: needs neither MPI nor a GPU.
"""
