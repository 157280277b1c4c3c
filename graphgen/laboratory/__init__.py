"""The pass laboratory: what each pass did, gained and cost, and why it did not fire."""
