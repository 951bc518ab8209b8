"""Run `teachllm bench serve`: load on a server, and how it bears it.

The load is open: when a request is sent was drawn before the first one was, and no answer changes it. A closed loop,
which sends the next request when one has come back, slows down with the server and so never shows what happens to
users who do not wait for each other.

    dataset.py    what is sent
    arrivals.py   when
    client.py     one request: HTTP, server-sent events, time stamps
    load.py       all of them, and how well the client itself kept up
    figures.py    TTFT, TPOT, ITL, end to end, goodput
    timeline.py   the same as a picture
"""
