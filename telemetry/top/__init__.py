"""``octavo top``: what a running engine does, read from its metrics endpoint and shown in a terminal.

``reading`` fetches and parses one scrape, ``rates`` compares scrapes, ``board`` names what is shown, ``watching`` keeps
what the picture needs of the past, ``panels`` and ``picture`` draw, ``live`` runs it all, ``command`` is the command.
"""
