"""What Dynamo does otherwise while it captures for us, so that less ends a graph; a file each."""
