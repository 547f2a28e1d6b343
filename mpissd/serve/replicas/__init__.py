"""Servers that share requests: each says its address in a folder, of which HAProxy's file is made.

A folder that all nodes see is all that they share: no locks, no clock, no port that is agreed on.
"""
