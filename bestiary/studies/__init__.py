"""Studies: many runs from one file, and what came of them on one page.

study (the file) → trial (one run of it) → run (what is missing) → results → report, page
"""
