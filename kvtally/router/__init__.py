"""The router: an OpenAI-compatible server in front of prefill and decode engines.

    app.py         the HTTP server: paths, start, stop
    intake.py      connections and bodies on their way in, and the room that they may take
    proxy.py       one request's way, from its arrival to its log line
    exchange.py    one request's state
    body.py        what a body says, what is taken out of it, and what each leg is sent
    elements.py    how many elements a body has, counted before they are built
    headers.py     which headers pass, and the router's own
    prefill.py     whether prefill is asked, and what comes of it
    flavours/      what each kind of hand-off needs, one small class each
    fleet.py       the instances: health, load, draining
    legs.py        one request to one instance, and how that fails
    upstream.py    HTTP towards engines
    receipts.py    reading receipts from stores
    stores.py      which store has a prompt, how others reach it, what was pulled from it
    judging.py     what a receipt proves, what strict mode refuses, what the router learns
    relay.py       bytes towards the client, and how an answer ends
    book.py        counters and the last records
    requestlog.py  one line for each request
    metrics.py     the counters as Prometheus text
    tenants.py     the salt that keeps tenants' caches apart

Never imports the store or the engine's connector. Threading: one event loop, a thread that writes the request log, and
one that takes large bodies apart.
"""
