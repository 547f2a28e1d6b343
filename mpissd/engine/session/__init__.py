"""Sessions: run one configuration on ranks whose devices and links are open."""
