"""Detects, from a separate process, which rank is gone, since when and in which phase.

One small process a host, the warden, watches every rank there and outlives each of them. A rank may
be killed, stopped, or stuck in a library that holds Python's lock; the warden still sees it, names
the culprit in one line, and ends the others.
"""
