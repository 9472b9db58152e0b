"""How an expert is trained, kept, merged and played."""
