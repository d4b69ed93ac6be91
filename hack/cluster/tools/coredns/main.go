// The CoreDNS of the test node, with the plugins of its Corefile alone: the whole one takes several times as long to
// build, for the clients of clouds that it brings.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/template"
)

func main() {
	dnsserver.Directives = []string{"bind", "errors", "template", "kubernetes"} // in the order in which they answer
	coremain.Run()
}
