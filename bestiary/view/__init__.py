"""`bestiary view`: a local web application that shows runs, studies and the games of agents.

    security.py       which requests are answered
    catalogue.py      which runs, studies and files the application shows
    table_tail.py     CSV tables of running trainings, read incrementally
    curves.py         smoothing, bands over seeds and thinning of curves
    charts.py         options of the charts
    game.py           a game that is played in the browser, and can be continued from any earlier step
    overlays.py       saliency and attention maps of such a game
    answers.py        effects of another action, observation or state of the game
    page_elements.py  frame of all pages (header, theme), boxes, tables and charts
    pages/            one module per page, and modules for the parts of the player
    server.py         the web server

The pages read run folders and never write to them.
"""
