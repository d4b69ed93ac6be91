// Kubernetes' scheduler with the one plugin that gangs need, as the scheduler-plugins project builds its own with all
// of its plugins: the others would bring hundreds of modules that no test asks for.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"

	_ "sigs.k8s.io/scheduler-plugins/apis/config/scheme" // so that CoschedulingArgs can be read
	"sigs.k8s.io/scheduler-plugins/pkg/coscheduling"
)

func main() {
	os.Exit(cli.Run(app.NewSchedulerCommand(app.WithPlugin(coscheduling.Name, coscheduling.New))))
}
