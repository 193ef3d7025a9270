"""Data: who reads which sample when, and how a batch becomes arguments and labels."""
