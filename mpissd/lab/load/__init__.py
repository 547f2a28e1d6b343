"""Open-loop load: arrivals do not depend on the server, and times count from the arrivals."""
