"""Where spans go: set-up of the OpenTelemetry SDK for an application. Nothing else in Octavo needs the SDK."""
