"""Helpers that several benchmarks share.

script     a script's flags and its JSON output, with commit, hardware and versions
ledger     a file of runs that are never repeated
jobs       processes side by side that share the runs of a ledger
search     tuning on a grid that widens at its edges
coordinates  tuning of one number after another
recipe_space  what a search around the recipe varies
timing     clocks for work that runs on a GPU
markdown   tables
labels     names beside the lines of a plot
pages      generated parts of the docs
peers_table  whether we are not worse than others
"""
