"""The benchmark: mpwriter beside the stock writers of torch, in one run.

Runs in: trainer (the benchmark's own process). `scripts/benchmark.py` is its command.

    main ---> sync_mode ----> timing, fresh -------------------> subjects, places ---> states
     |            `---------> sync_report, sync_rows ---> stats, table, plot
     |------> async_mode ---> async_timing, training, neighbours, references, checkpoint_process
     |            |---------> async_subjects ------------------> subjects, places ---> states
     |            `---------> async_report ---> stats, table, plot
     |------> job (figures of all ranks)
     `------> options, machine, ranks

A mode (`sync_mode`, `async_mode`) says what is measured, and its report says how that is shown;
the other modules are shared by all modes. `peer` is
another project's writer and reader for S3. `discard` is a filesystem to leave the disk out.
`process_tree` is free of torch and of the package: it also runs as a script of its own beside the
process that it watches. `device_checks`, `device_locks` and `device_rig` are the parts of
`scripts/device_check.py`.
"""
