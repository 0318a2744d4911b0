"""What is written of a run for people: metrics, samples, and where they are sent."""
