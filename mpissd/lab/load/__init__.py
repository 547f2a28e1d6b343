"""Open-loop load: arrivals do not depend on the server's progress, and each request's times count
from its arrival."""
