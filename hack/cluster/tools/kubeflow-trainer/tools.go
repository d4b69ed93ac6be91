//go:build tools

// Package tools names Kubeflow Trainer, so that go.mod and go.sum pin everything that it is built from.
// It is never compiled: the build tag above is never set.
package tools

import _ "github.com/kubeflow/trainer/v2/cmd/trainer-controller-manager"
