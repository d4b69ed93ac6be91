"""What takes longer than a turn may: asked beside the turns, and a later turn sees the answer."""
