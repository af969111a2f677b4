"""What the streams of all APIs share: their events, what each tells of its answer, and how they are sent."""
