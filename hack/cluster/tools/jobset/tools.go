//go:build tools

// Package tools names JobSet, so that go.mod and go.sum pin everything that it is built from.
// It is never compiled: the build tag above is never set.
package tools

import _ "sigs.k8s.io/jobset"
