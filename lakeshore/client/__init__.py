"""What users hold: UDFs, queues, streams and jobs claimed by hand."""
