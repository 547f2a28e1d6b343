"""Load tests: requests arrive at given times, whether or not earlier ones were answered."""
