{{/* Names are fixed: there is one operator per cluster, and a second release must collide instead of fighting it. */}}
{{- define "sluice.name" -}}sluice-operator{{- end }}

{{- define "sluice.selector" -}}
app.kubernetes.io/name: sluice
app.kubernetes.io/component: operator
{{- end }}

{{- define "sluice.labels" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "sluice.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* The operator's configuration file: the values, plus what follows from where the chart is installed. */}}
{{- define "sluice.config" -}}
{{ toYaml .Values.config }}
namespaces: {{ toJson .Values.namespaces }}
leaseNamespace: {{ .Release.Namespace }}
routerTokenFile: /var/run/secrets/sluice/router/token
operatorSubject: system:serviceaccount:{{ .Release.Namespace }}:{{ include "sluice.name" . }}
{{- end }}

{{- define "sluice.isNamespaced" -}}
{{- if .Values.namespaces }}true{{ end -}}
{{- end }}

{{/* What the operator does in the namespaces of services: each verb is used, and none is there for later. */}}
{{- define "sluice.namespacedRules" -}}
- apiGroups: [serving.sluice.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [serving.sluice.dev]
  resources: [inferenceservices/status]
  verbs: [patch]
# Owner references with blockOwnerDeletion need this under OwnerReferencesPermissionEnforcement.
- apiGroups: [serving.sluice.dev]
  resources: [inferenceservices/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
# The readiness gate.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [controllerrevisions]
  verbs: [get, list, watch, create, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end }}
