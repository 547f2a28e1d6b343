"""The decoding loops: one target loop, one draft loop; a method is a choice of speculator."""
