"""Who may send how much now: caps on what this node sends, and groups that yield to others."""
