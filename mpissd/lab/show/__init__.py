"""Shows an answer to the user while it is decoded."""
