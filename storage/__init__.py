"""Storage: where blocks of K and V go when they leave the device, and how they come back. Knows no engine."""
