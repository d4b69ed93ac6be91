//go:build tools

// Package tools names the program that this module pins. It is never compiled: the build tag above is never set.
package tools

import _ "github.com/coredns/coredns"
