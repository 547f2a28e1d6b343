"""Ranks and messages: topology, target group, lead-draft link, wire format. MPI lives here."""
