"""What a person sees of an answer while it is decoded."""
