"""Callbacks for trainers. Each module needs a package of its own, named by its extra."""
