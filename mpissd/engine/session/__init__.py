"""Runs one configuration on ranks whose devices and communicators are open (a session)."""
