"""TierManager: the tiers below device memory as one, whatever becomes of each of them."""
