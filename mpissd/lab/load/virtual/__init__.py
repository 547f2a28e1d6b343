"""A server in virtual time: the real driver, scheduler and controller over modelled rounds."""
