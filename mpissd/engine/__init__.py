"""What decodes: the algorithm, the machine, the models, the workloads and the two loops."""
