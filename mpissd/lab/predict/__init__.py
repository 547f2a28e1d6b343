"""Predicts what a job would measure, says which job to run, and why a result is not faster.

costs       what a round's pieces take: host work by phase, forwards by row count
timing      how the pieces add up to a round's moments
draws       what decides outcomes: a run's own draws, or fresh ones from its laws
recurrence  the round by round simulation of the loops in `decode`, on those draws
prediction  the result of that simulation, round by round and in sum
row         predict_row: a prediction with the keys of a result row
closed      the expectation without sampling, over many configurations at once
search      the configurations that an advisor may choose from; laws: under which laws
stationary  the long-run law of a chain of rounds; coverage: what a profile has measured
places      where a pair can run on a machine; derive: at a T that was not measured
advisor     which mode, T, K, fan-out and backup to run on given GPUs; breakeven: where that ties;
            advice: what plan says of it
why         the largest gaps between a result row and its floor

Pure NumPy: needs neither MPI nor a GPU.
"""
