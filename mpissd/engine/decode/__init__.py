"""The decoding loops: one target loop and one draft loop; AR, SD and SSD are choices of
speculator."""
