"""A conversation in the terminal: `front` talks to the person, `serve` to the models, on the ranks
of a job."""
