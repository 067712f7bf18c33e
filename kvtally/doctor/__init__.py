"""`kvtally doctor`: what would keep KV reuse from happening in a deployment, or make it wrong.

    files ─▶ tree (text, with line numbers) ─▶ readers ─▶ model: Deployment ─▶ rules ─▶ findings
                                       shell (command lines) ─┘        facts ─┘

    a running deployment ─▶ live (asks it) ─▶ verdict

`examine` opens files and `live` asks servers; everything else is pure. Readers know what each kind of file means and
judge nothing; rules judge and know no file format. `cli.doctor` is the command. Nothing here imports vLLM or a router.
"""
