"""What a federated round costs."""
