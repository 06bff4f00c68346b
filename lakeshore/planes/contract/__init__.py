"""What every plane must do: operations, records, news and the `Store` protocol."""
