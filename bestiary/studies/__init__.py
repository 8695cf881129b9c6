"""Studies: one file describes many runs, and one HTML page shows their results.

A study uses the modules in this order:
study_file -> study (its variants) -> trial (one run) -> runner, executors -> results -> study_report

`folder_report` writes a page about all runs below a folder, whether they belong to a study or not.
"""
