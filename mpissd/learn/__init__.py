"""Making a draft of a target: samples, shape, training, evaluation, quantisation and files."""
