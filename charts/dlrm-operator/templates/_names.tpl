{{- define "dlrm.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* At most 40 characters: further words follow it in names of at most 63. */ -}}
{{- define "dlrm.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "dlrm.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "dlrm.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- /* Objects of the cluster carry the namespace, so that releases in different namespaces do not collide. */ -}}
{{- define "dlrm.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "dlrm.fullname" .) -}}
{{- end -}}

{{- /* Never the chart's version: selectors cannot change. */ -}}
{{- define "dlrm.selector" -}}
app.kubernetes.io/name: {{ include "dlrm.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "dlrm.labels" -}}
{{ include "dlrm.selector" . }}
{{ include "dlrm.sharedLabels" . }}
{{- end -}}

{{- /* Of all objects, whatever they are a part of. */ -}}
{{- define "dlrm.sharedLabels" -}}
app.kubernetes.io/part-of: dlrm
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* A list of the root and of labels that one object has besides: they win over all but those of the selector. */ -}}
{{- define "dlrm.labelsAnd" -}}
{{- $root := index . 0 -}}
{{- merge (dict) (include "dlrm.selector" $root | fromYaml) (index . 1) (include "dlrm.labels" $root | fromYaml) | toYaml -}}
{{- end -}}

{{- /* Of what `helm test` makes: no selector of the operator's may find it. */ -}}
{{- define "dlrm.testSelector" -}}
app.kubernetes.io/name: {{ include "dlrm.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: test
{{- end -}}

{{- define "dlrm.testLabels" -}}
{{ include "dlrm.testSelector" . }}
{{ include "dlrm.sharedLabels" . }}
{{- end -}}

{{- define "dlrm.testHook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}

{{- define "dlrm.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "dlrm.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "dlrm.served" -}}
{{- .Values.scope.namespace | default .Release.Namespace -}}
{{- end -}}

{{- define "dlrm.profilesNamespace" -}}
{{- ternary (include "dlrm.served" .) .Release.Namespace .Values.scope.namespaced -}}
{{- end -}}

{{- define "dlrm.webhookSecret" -}}
{{- .Values.webhook.certificate.existingSecret | default (printf "%s-webhook" (include "dlrm.fullname" .)) -}}
{{- end -}}

{{- /* A list of the root and of an image's name. */ -}}
{{- define "dlrm.ownImage" -}}
{{- $registry := (index . 0).Values.registry | trimSuffix "/" -}}
{{- if $registry }}{{ $registry }}/{{ end }}{{ index . 1 -}}
{{- end -}}

{{- /* A list of the root, the image that a value names, and the name of the default one. */ -}}
{{- define "dlrm.jobImage" -}}
{{- $own := include "dlrm.ownImage" (list (index . 0) (index . 2)) -}}
{{- index . 1 | default (printf "%s:%s" $own (index . 0).Chart.AppVersion) -}}
{{- end -}}

{{- define "dlrm.image" -}}
{{- .Values.image.repository | default (include "dlrm.ownImage" (list . "dlrm-operator")) -}}
{{- if .Values.image.digest -}}
@{{ .Values.image.digest }}
{{- else -}}
:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- /* Of the operator's pods and of those of `helm test`; the value's own labels win. */ -}}
{{- define "dlrm.nodeSelector" -}}
{{- $images := dict "kubernetes.io/os" "linux" -}}
{{- with .Values.architecture }}{{ $_ := set $images "kubernetes.io/arch" . }}{{ end -}}
{{- merge (dict) .Values.pod.nodeSelector $images | toYaml -}}
{{- end -}}

{{- /* Secrets that are named as texts or as in a pod. */ -}}
{{- define "dlrm.pullSecrets" -}}
{{- range . }}
- name: {{ if kindIs "map" . }}{{ .name }}{{ else }}{{ . }}{{ end }}
{{- end }}
{{- end -}}

{{- /* Names of the Secrets, separated by commas. */ -}}
{{- define "dlrm.pullSecretNames" -}}
{{- range $position, $secret := . -}}
{{- if $position }},{{ end }}{{ if kindIs "map" $secret }}{{ $secret.name }}{{ else }}{{ $secret }}{{ end }}
{{- end -}}
{{- end -}}

{{- /* A duration of hours, minutes and seconds in seconds. */ -}}
{{- define "dlrm.seconds" -}}
{{- $seconds := 0 -}}
{{- range regexFindAll "[0-9]+[hms]" . -1 -}}
{{- $factor := get (dict "h" 3600 "m" 60 "s" 1) (trimAll "0123456789" .) -}}
{{- $seconds = add $seconds (mul $factor (int (trimAll "hms" .))) -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}

{{- /* Scrape interval and timeout. The Prometheus Operator refuses a timeout above the interval. */ -}}
{{- define "dlrm.scrapes" -}}
{{- if lt (int (include "dlrm.seconds" .Values.monitoring.interval)) (int (include "dlrm.seconds" .Values.monitoring.scrapeTimeout)) -}}
{{- fail "monitoring.interval must not be below monitoring.scrapeTimeout" -}}
{{- end -}}
interval: {{ .Values.monitoring.interval }}
scrapeTimeout: {{ .Values.monitoring.scrapeTimeout }}
{{- end -}}

{{- /* Limits above which a scrape fails; 0 and "" set none. */ -}}
{{- define "dlrm.scrapeLimits" -}}
{{- with .sampleLimit }}
sampleLimit: {{ int64 . }}
{{- end }}
{{- with .bodySizeLimit }}
bodySizeLimit: {{ . }}
{{- end }}
{{- end -}}

{{- /* What the operator puts on the pods of jobs. */ -}}
{{- define "dlrm.trainerLabels" -}}
app.kubernetes.io/managed-by: dlrm-operator
dlrm.dev/role: trainer
{{- end -}}
