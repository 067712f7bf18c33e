"""The router: an OpenAI-compatible server before pools of prefill and decode engines.

    app.py         the HTTP server: paths, start, stop
    proxy.py       one request's way: prefill, decode, verdict
    intake.py      connections and bodies on their way in, and the room they may take
    trip.py        one request: what came, what is known of it, what became of it
    body.py        what a request's body says, what is taken out of it, and what each leg gets
    elements.py    how many elements a body has, counted before they are built
    headers.py     which headers pass, and the router's own
    flavours/      what each kind of hand-off needs, one small class each
    pool.py        instances: health, load, draining
    engines.py     one leg to one instance, and how it fails
    upstream.py    HTTP towards engines
    relay.py       bytes towards the client, and how an answer ends
    stores.py      reading receipts from stores
    tally.py       matching halves; counters, the last receipts
    requestlog.py  one line for each request
    metrics.py     the counters as Prometheus text
    tenants.py     the salt that keeps tenants' caches apart

Never imports the store or the engine's connector. Threading: one event loop, a thread that
writes the request log, and one that takes large bodies apart.
"""
