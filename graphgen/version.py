"""The version: the build reads it here, so that a plain checkout knows it as well."""

VERSION = "0.1.0"
